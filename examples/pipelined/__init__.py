"""What pipeline_moe_lm.py is made of."""
