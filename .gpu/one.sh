# One GPU: tests and the loss curves beside each other, then kernels.
L="python3 -m disttrain_launch --standalone --nproc-per-node"
M=benchmarks/models_gpu.py
(timeout 70 python3 -m pytest -p no:benchmark -p no:cacheprovider -q --tb=short --durations=4 tests/gpu/test_gpu_kernels.py > $OUT/tests.txt 2>&1 < /dev/null) &
A=$!
timeout 65 $L 1 $M fsdp --preset small --batch 8 --steps 198 --batches 200 --lr 1e-3 --ways "torch fp32" torch kernels --out $OUT/curves.json > $OUT/curves.txt 2>&1 < /dev/null
wait $A
timeout 55 python3 -m disttrain.kernels bench --out $OUT/kernels.json > $OUT/bench.txt 2>&1 < /dev/null
tail -n 4 $OUT/tests.txt; tail -n 25 $OUT/bench.txt; tail -n 5 $OUT/curves.txt
