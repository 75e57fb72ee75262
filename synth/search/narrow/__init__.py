"""Where exact tables would not fit: messages, mini-buckets, and fewer and fewer values."""
