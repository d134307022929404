"""`python -m sluice` is the command `sluice`."""

import signal
import sys

from sluice.start import STOPPED, end_early, own_packages

told = STOPPED.get(sys.argv[1] if len(sys.argv) > 1 else "", "")
end_early(told)
own_packages()

from launcher.cli import main  # noqa: E402 - only now it is Sluice's

if not told:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on the command heeds it

if __name__ == "__main__":
    main()
