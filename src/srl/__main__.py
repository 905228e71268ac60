"""``python -m srl`` is the ``srl`` command."""

from srl.cli import main

main()
