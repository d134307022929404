"""The benches of `sluice bench`, each in the module or package of its name; `command` has the table of them.

What a bench starts as a process of its own is a `*_trial` module beside it, or `worker`, which measures what it is told to.
"""
