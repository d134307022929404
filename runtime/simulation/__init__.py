"""The real run on a virtual clock: what is simulated are the roles beyond the ports, and nothing of the coordinator.

::

    SimulatedLoop ── time, order, executors, from one seed
         │ runs
    TrainingRun (runtime.coordinator, as it is) ── ledger on a real file system
         │ ports (runtime.commands)
    SimulatedCluster ── starts, ends and replaces ──► SimulatedProcess: rollout, reward, reference, trainer, critic
         │                                        │ Costs: seconds by tokens, bytes and batch
       Faults (by seed)                      Witness: what has to hold, told by those whom it happens to
"""
