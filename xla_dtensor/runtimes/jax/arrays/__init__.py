"""What is known of JAX arrays: devices, shardings, dtypes, products, and the running trace."""
