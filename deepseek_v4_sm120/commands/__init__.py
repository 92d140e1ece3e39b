"""What users run: `python3 -m deepseek_v4_sm120 doctor|selftest|calibrate|plan|serve|status`, and what those share."""
