"""What pipeline_traced.py is made of."""
