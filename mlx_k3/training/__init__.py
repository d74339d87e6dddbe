"""Training the whole family: optimizer, load balance, quantization awareness, trainer."""
