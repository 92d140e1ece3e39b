"""What of a scheduler's side files the made tree of conftest.py has."""

STAGES = "class SchedulerPPMixin:\n    def _pp_recv_dict_from_prev_stage(self): pass\n"
STAGES += "    def _pp_recv_proxy_tensors(self): pass\n"
STAGES += "    def _pp_send_dict_to_next_stage(self, tensor_dict, async_send=True, msg_type='default'): pass\n"
TREE_CORE = "class UnifiedTreeCore:\n    def _match_prefix_helper(self, key): pass\n"
TREE_CORE += "    def _insert_walk_step(self, state): pass\n    def _add_new_node(self, parent, key, value): pass\n"
CHECKS = "class SchedulerInvariantChecker:\n    def _check_tree_cache(self): pass\n"
