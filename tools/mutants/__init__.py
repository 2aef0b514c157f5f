"""Old bugs, put back one by one, and the tests that must find each of them.

A suite that passes says nothing of what it would have found. Here is a list of faults that this
library once had, `mutants.yaml`: for each a text of the code as it is now, the text that brings the
fault back, and the tests that must fail then. ``python -m tools.mutants`` puts them back one by
one, in a copy of the tree, runs the named tests only, and is red where one of them survives.

    python -m tools.mutants --check                   do all texts still stand in the code?  1 s
    python -m tools.mutants two_axes_on_one_dim       one mutant: 10 s
    python -m tools.mutants --suite contract          those that the contract suite must find

Modules: `mutant` is the data, `place` finds and replaces texts, `recorder` is a pytest plugin that
writes down how each test ended, `trial` runs tests in a copy, `verdict` judges, `__main__` is the
command line. README.md says how to add one.
"""
