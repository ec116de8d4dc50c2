"""The study of top-k: the k largest elements of one buffer, by ours and by others, each beside one pass over memory."""
