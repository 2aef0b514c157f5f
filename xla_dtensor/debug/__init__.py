"""What shows a user where tensors lie, and why: explain, profile, visualize, explicit mode."""
