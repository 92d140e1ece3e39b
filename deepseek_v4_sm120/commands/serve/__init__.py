"""`python3 -m deepseek_v4_sm120 serve`: run the plan here, show everything, stop cleanly."""
