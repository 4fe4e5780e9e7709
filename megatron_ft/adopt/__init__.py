"""A stage without a process is run by the neighbouring stage's, beside its own (MeCeFO)."""
