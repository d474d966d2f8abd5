"""The learner on verl's worker groups (Ray, FSDP)."""
