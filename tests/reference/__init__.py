"""Our algorithms against the implementations that verl and TRL ship: `make test-verl`.

The versions are those of constraints-verl.txt. What they do differently from us is shown by running both, with the
value of each. A package, so that its conftest isn't taken for the one in tests/.
"""
