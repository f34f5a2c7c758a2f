"""Turns texts into token ids."""
