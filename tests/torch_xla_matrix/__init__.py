"""What torch_xla 2.9's own DTensor does, case by case, and the test of what xla_dtensor does.

Every case runs on both runtimes. SILENT: torch_xla is wrong or misleading without an error; the
name of the test says in what. RAISES: torch_xla raises, mostly where an inner attribute is missing.
OK: torch_xla is right as well. The test modules are the letters: A distribute_tensor, B from_local,
to_local and redistribute, C placements, D factories, E distribute_module, F parallelize_module, G
meshes, data parallelism and checkpoints, H torch.compile, I training, J the object's protocols, K
mixing, L propagation, M annotations, N a late start, O HybridMesh.

====  ==============================================================  ==============================
case  test                                                            torch_xla 2.9
====  ==============================================================  ==============================
A01   test_placements_are_how_xla_lays_it                             OK: Shard, negative dims, both
A02   test_mesh_of_one_axis                                           OK
A03   test_scalar                                                     OK
A04   test_without_placements_it_is_replicated                        OK
A05   test_without_a_source_rank                                      OK
A06   test_dtypes                                                     OK: seven dtypes
A07   test_silent_first_axis_dropped_when_two_cut_one_dim             SILENT: cut 4 ways, not 8
A08   test_silent_strided_shard_read_as_plain_shard                   SILENT: a plain Shard
A09   test_partial_is_refused                                         RAISES
A10   test_uneven_dims                                                OK
A11   test_silent_requires_grad_dropped                               SILENT
A12   test_silent_parameter_becomes_tensor_without_gradient           SILENT
A13   test_silent_input_annotated_and_written_in_place                SILENT: caller's tensor
A14   test_silent_input_on_the_devices_aliased                        SILENT: caller's tensor
A15   test_silent_device_order_reported_as_ascending                  SILENT: mesh says 0..n-1
A16   test_mesh_smaller_than_the_world                                RAISES a bare assertion
A17   test_meta_tensor_and_deferred_init                              RAISES
A18   test_dim_out_of_range                                           RAISES list index out of range
A19   test_distributing_again                                         RAISES a bare assertion
B01   test_from_local_of_a_host_tensor                                RAISES
B02   test_from_local_of_a_device_tensor                              RAISES
B03   test_from_local_of_torch_itself                                 RAISES
B04   test_from_local_with_run_check                                  RAISES
B05   test_to_local                                                   RAISES
B06   test_full_tensor                                                RAISES
B07   test_redistribute_by_placements                                 RAISES
B08   test_redistribute_to_a_device_mesh                              RAISES
B09   test_silent_redistribute_changes_its_source                     SILENT: it moves in place
B10   test_silent_redistribute_drops_an_axis_when_two_cut_one_dim     SILENT: cut 4 ways, not 8
B11   test_silent_redistribute_of_an_activation_drops_autograd        SILENT: no grad_fn
B12   test_silent_asynchronous_redistribute_only_clones               SILENT: nothing is moved
C01   test_placements_of_results                                      RAISES: six kinds of results
C02   test_placements_after_the_value_is_computed                     RAISES
C03   test_silent_named_axes_reported_as_replicated                   SILENT: (Replicate, Replicate)
C04   test_silent_tuples_of_axes_reported_as_replicated               SILENT: (Replicate, Replicate)
C05   test_silent_view_in_place_changes_the_shape_but_not_the_data    SILENT
D01   test_factories                                                  RAISES: six factories
D02   test_factories_of_torch_itself                                  RAISES: six factories
D03   test_silent_zeros_like_replicated                               SILENT: optimizer state whole
E01   test_silent_module_without_partition_fn_left_on_the_host        SILENT: nothing is done
E02   test_partition_fn_and_forward                                   RAISES: functionalization
E03   test_partition_fn_through_torch_itself                          RAISES: functionalization
E04   test_input_fn                                                   OK
E05   test_output_fn_that_redistributes                               RAISES
E06   test_auto_policy_is_refused_not_ignored                         OK on TPU only
F01   test_colwise                                                    RAISES in forward
F02   test_rowwise                                                    RAISES in forward
F03   test_sequence_parallel                                          RAISES
F04   test_rowwise_embedding                                          RAISES
F05   test_plan_on_a_submesh_beside_a_sharded_batch                   RAISES
G01   test_submesh_by_name                                            RAISES
G02   test_coordinate_and_local_rank                                  RAISES
G03   test_flatten                                                    RAISES
G04   test_groups_are_refused_with_a_way_out                          RAISES
G05   test_mesh_as_a_context                                          OK
G06   test_init_device_mesh                                           OK
G07   test_fully_shard                                                RAISES
G08   test_distributed_data_parallel_is_refused                       RAISES
G09   test_distributed_data_parallel_replaced_by_sharded_batches      RAISES
G10   test_default_writer                                             RAISES beside torchax
G11   test_default_planner_and_another_sharding                       RAISES
G12   test_marked_tensor_is_saved_in_shards                           OK, but gathered whole
G13   test_silent_uneven_target_left_replicated_by_a_load             SILENT: sharding dropped
G14   test_silent_partly_replicated_tensor_saved_as_nothing           SILENT: data lost
G15   test_silent_loss_by_torch_xlas_own_planner_is_an_error_or_no_loss  SILENT: data lost
G16   test_model_state_dict                                           RAISES
G17   test_model_state_dict_of_a_marked_module                        OK, as plain tensors
H01   test_dtensor_through_aot_eager                                  RAISES
H02   test_openxla_is_refused                                         RAISES
H03   test_marked_tensor_is_compiled                                  OK
H04   test_module_training_is_compiled                                OK for plain marked tensors
I01   test_parameters_made_of_dtensors                                RAISES: functionalization
I02   test_parameters_marked_in_place                                 OK
I03   test_clip_grad_norm                                             OK
J01   test_equality_and_hash                                          OK
J02   test_text_names_the_placements                                  OK, but prints all values
J03   test_format_of_a_scalar                                         RAISES
J04   test_save_and_pickle                                            RAISES
J05   test_deepcopy                                                   RAISES
J06   test_host_copy_is_a_plain_tensor                                RAISES: numpy() and tolist()
J07   test_numbers_and_truth                                          OK
K01   test_silent_mixing_gives_a_half_built_object                    SILENT: no global_tensor
K02   test_write_through_a_view                                       RAISES: functionalization
K03   test_convolution                                                RAISES: functionalization
K04   test_attention                                                  RAISES: functionalization
K05   test_two_meshes_in_one_op                                       OK
K06   test_local_map                                                  RAISES
K07   test_loss_parallel                                              OK in value
K08   test_silent_comm_debug_mode_reports_no_communication            SILENT: always 0
K09   test_communication_is_read_from_the_program                     SILENT: always 0
K10   test_picture_of_a_sharding_by_torch                             RAISES
K11   test_picture_of_a_sharding_read_from_the_runtime                RAISES
K12   test_functional_collectives_on_a_dtensor_name_the_way_out       RAISES an inner attribute
K13   test_functional_collectives_on_a_local_view                     RAISES
L01   test_head_axis_is_kept                                          lost, but for einsum
L02   test_head_axis_is_kept_in_a_local_region                        RAISES
L03   test_values_without_a_local_region                              OK
M01   test_marking_twice                                              RAISES
M02   test_partition_spec_has_full_rank                               RAISES
M03   test_sharding_spec_of_lower_rank_than_the_mesh                  RAISES IndexError on inputs
M04   test_silent_equal_meshes_miss_the_cache                         SILENT: each call works anew
M05   test_jax_arrays_of_a_marked_tensor_need_no_jax_mesh             RAISES on CPU
N01   test_silent_segmentation_fault_where_torch_xla_started_without_spmd  SILENT: then exit -11
N02   test_jax_started_with_fewer_devices                             not on JAX
O01   test_hybrid_mesh_on_cpu                                         RAISES a bare assertion
O02   test_hybrid_mesh_with_dcn_on_one_slice                          RAISES
O03   test_hybrid_mesh_of_two_slices                                  OK
O04   test_hybrid_mesh_of_two_slices_needs_a_dcn_shape                RAISES
O05   test_hybrid_mesh_of_two_cores_per_chip                          RAISES
O06   test_hybrid_mesh_of_synthetic_devices                           RAISES on devices not there
====  ==============================================================  ==============================
"""
