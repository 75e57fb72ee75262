"""The commands of `shardwright`, one module each; `shardwright.cli` lists them."""
