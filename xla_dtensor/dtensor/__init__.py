"""DTensor, LocalView and DeviceMesh: dispatch, placements, redistribution, collectives, records."""
