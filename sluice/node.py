"""One node of a cluster, under torchrun: `torchrun ... -m sluice.node CONFIG` (`launcher.node`)."""

from sluice.start import STOPPED, end_early, own_packages

if __name__ == "__main__":
    end_early(STOPPED["node"])
own_packages()

from launcher.node.__main__ import main  # noqa: E402 - only now it is Sluice's

if __name__ == "__main__":
    main()
