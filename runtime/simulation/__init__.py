"""The real coordinator on a virtual clock: only the roles beyond the ports of `runtime.commands` are simulated."""
