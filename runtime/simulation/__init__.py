"""The real coordinator on a virtual clock: only the roles beyond the ports are simulated.

::

    SimulatedLoop ── time, order, executors, from one seed
         │ runs
    TrainingRun (runtime.coordinator, as it is) ── ledger on a real file system
         │ ports (runtime.commands)
    SimulatedCluster ── starts, ends and replaces ──► SimulatedProcess: rollout, reward, reference, trainer, critic
         │                                        │ Costs: seconds by tokens, bytes and batch
       Faults (by seed)                      Witness: checks invariants, as an observer of the processes
"""
