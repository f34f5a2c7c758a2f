def drag(speed):
    return speed**2
