"""Every change that megatron_ft makes to Megatron-Core or torch, one file per area.

``python -m megatron_ft.patches`` prints the table.
"""
