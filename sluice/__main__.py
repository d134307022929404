"""`python -m sluice` is the command `sluice`."""

from sluice.start import own_packages

own_packages()

from launcher.cli import main  # noqa: E402 - only now it is Sluice's

if __name__ == "__main__":
    main()
