"""A step as one XLA program: what it reads and guards, its trace, its layers, its executable."""
