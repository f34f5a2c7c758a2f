SELECT name FROM pumps;
