"""Megatron-core as trainer. Shapes and weight layouts are plain torch; the rest imports Megatron-core."""
