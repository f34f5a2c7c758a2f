"""What the command can do, a module each: `add(commands)` makes its parser, and `run(arguments)` does the work."""
