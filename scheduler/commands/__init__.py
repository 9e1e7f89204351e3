"""The commands of the command line, one file each: they parse, call and print."""
