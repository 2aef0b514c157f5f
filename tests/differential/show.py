"""Print a program: ``python -m tests.differential.show SEED``."""

from __future__ import annotations

import sys

from tests.differential.generating import make_program


def main() -> None:
    """Print leaves and steps, with the number of the tensor that each makes."""
    program = make_program(int(sys.argv[1]))
    print(f"mesh {program.mesh_shape}, loss {program.loss or 'none'}")
    for number, line in enumerate((*program.leaves, *program.steps)):
        print(f"{number}: {line}")


if __name__ == "__main__":
    main()
