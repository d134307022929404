"""Pure functions of the algorithms. Importing the package registers every module of this folder.

To add an advantage, loss, KL estimator or aggregation, decorate one function. No module imports torch at run time (tensors
bring their own methods), so that the names can be checked where torch is not loaded."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
