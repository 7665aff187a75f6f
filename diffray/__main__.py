"""`python -m diffray` is the command `diffray`."""

from diffray.cluster.cli import app

app(prog_name="diffray")
