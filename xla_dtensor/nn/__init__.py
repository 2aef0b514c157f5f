"""What acts on modules and steps: sharding, fully_shard, scanned layers, compile, materialize."""
