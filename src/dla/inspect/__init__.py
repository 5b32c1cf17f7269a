"""What the memory did: views of a segmentation."""
