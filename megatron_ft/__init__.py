"""megatron_ft: Megatron-Core pretraining that goes on when processes die."""
