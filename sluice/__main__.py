"""`python -m sluice` is the command `sluice`."""

import signal
import sys

from sluice.start import STOPPED, end_early, own_packages

last_line = STOPPED.get(sys.argv[1] if len(sys.argv) > 1 else "", "")
end_early(last_line)
own_packages()

from launcher.cli import main  # noqa: E402 - only now it is Sluice's

if not last_line:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on the command handles it

if __name__ == "__main__":
    main()
