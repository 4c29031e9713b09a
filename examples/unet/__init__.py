"""What pipeline_unet.py is made of."""
