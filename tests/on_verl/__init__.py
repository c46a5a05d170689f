"""The verl backend beside verl, without a server; run in .venv-verl by `make test-verl`."""
