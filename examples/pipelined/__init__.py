"""What pipeline_moe_lm.py and pipeline_torchrun.py are made of."""
