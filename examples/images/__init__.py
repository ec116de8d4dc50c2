"""A procedural JPEG image data set: what a class is, how an image is drawn, how the set is written and read."""
