# One GPU: tests and the loss curves beside each other, then kernels, then a short model without communication.
L="python3 -m disttrain_launch --standalone --nproc-per-node"
M=benchmarks/models_gpu.py
(timeout 75 python3 -m pytest -p no:benchmark -p no:cacheprovider -q --tb=short --durations=4 tests/gpu/test_gpu_kernels.py > $OUT/tests.txt 2>&1 < /dev/null) &
A=$!
timeout 70 $L 1 $M fsdp --preset small --batch 8 --steps 198 --batches 200 --lr 1e-3 --ways "torch fp32" torch kernels "kernels compiled" --patience 25 --out $OUT/curves.json > $OUT/curves.txt 2>&1 < /dev/null
wait $A
timeout 58 python3 -m disttrain.kernels bench --out $OUT/kernels.json > $OUT/bench.txt 2>&1 < /dev/null
timeout 60 $L 1 $M fsdp --steps 4 --layers 2 --patience 40 --ways "torch compiled" "kernels around compiled" "kernels compiled" kernels --profile "kernels around compiled" kernels --out $OUT/one.json > $OUT/one.txt 2>&1 < /dev/null
tail -n 4 $OUT/tests.txt; tail -n 25 $OUT/bench.txt; for f in one curves; do grep -v "  *[0-9.]* ms  *[0-9]*  " $OUT/$f.txt | tail -n 12; done; date
cd $OUT && tar czf one.tgz *.txt *.json && rm -f *.txt *.json; ls -la
