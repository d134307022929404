"""Check whether a process of a run serves (exit code): `python -m sluice.health_check HOST:PORT` (`services.health_check`)."""

import sys

from sluice.start import own_packages

own_packages()

from services.health_check import main  # noqa: E402 - only now it is Sluice's

if __name__ == "__main__":
    sys.exit(main())
