"""The first stage: k, v, g and beta become decisions. Scores, merge costs and the scan over tokens, in torch."""
