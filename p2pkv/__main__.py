"""``python -m p2pkv``: the command ``p2pkv``, where its script is not on the path."""

from p2pkv.cli import main

main()
