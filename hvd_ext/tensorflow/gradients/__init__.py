"""The gradients of a step: agreed over the ranks once, then reduced bucket by bucket."""
