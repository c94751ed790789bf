"""`python -m kvhandoff` is the `kvhandoff` command."""

from kvhandoff.cli import main

main()
