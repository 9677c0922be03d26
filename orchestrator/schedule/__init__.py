"""What runs while nobody watches: the queue of A/Bs, the windows they may use, the loop that starts and stops them."""
