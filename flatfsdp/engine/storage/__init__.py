"""What is there: the master shard, the compute shard, the gathered buffer, the gradients."""
