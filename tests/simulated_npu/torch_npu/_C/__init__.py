"""SIMULATION: in torch_npu a compiled module."""
