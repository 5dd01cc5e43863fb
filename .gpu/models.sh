# Round 1: kernels on one GPU each, side by side; then whole models on all four.
L="python3 -m disttrain_launch --standalone --nproc-per-node"
M=benchmarks/models_gpu.py
(CUDA_VISIBLE_DEVICES=0 timeout 58 python3 -m disttrain.kernels bench --out $OUT/kernels.json > $OUT/bench.txt 2>&1) < /dev/null &
A=$!
(CUDA_VISIBLE_DEVICES=1 timeout 38 python3 -m pytest -p no:benchmark -p no:cacheprovider -q --tb=short tests/gpu/test_gpu_kernels.py > $OUT/tests.txt 2>&1; CUDA_VISIBLE_DEVICES=1 timeout 30 $L 1 $M fsdp --preset small --batch 8 --steps 200 --batches 203 --lr 1e-3 --ways "torch fp32" torch kernels "kernels compiled" --patience 15 --out $OUT/curves.json > $OUT/curves.txt 2>&1) < /dev/null &
B=$!
(CUDA_VISIBLE_DEVICES=2 timeout 58 python3 .gpu/sweep.py norms 54 14 > $OUT/sweep_norms.txt 2>&1) < /dev/null &
C=$!
(CUDA_VISIBLE_DEVICES=3 timeout 50 python3 .gpu/sweep.py rest 46 10 > $OUT/sweep_rest.txt 2>&1) < /dev/null &
D=$!
wait $A $B $C $D
timeout 92 $L 4 $M fsdp --steps 5 --patience 52 --ways "torch compiled" "ours compiled" "kernels compiled" "kernels compiled, cudnn" kernels --profile "torch compiled" "kernels compiled" --out $OUT/fsdp.json > $OUT/fsdp.txt 2>&1 < /dev/null
timeout 55 $L 4 $M tp --steps 5 --patience 33 --ways "torch compiled, gathered logits" "kernels compiled" "torch compiled" "ours compiled" --profile "torch compiled, gathered logits" "kernels compiled" --out $OUT/tp.json > $OUT/tp.txt 2>&1 < /dev/null
timeout 50 $L 4 $M 2d --steps 5 --patience 30 --ways "torch compiled, gathered logits" "kernels compiled" "torch compiled" --profile "kernels compiled" --out $OUT/2d.json > $OUT/2d.txt 2>&1 < /dev/null
tail -n 4 $OUT/tests.txt; tail -n 25 $OUT/bench.txt; for f in fsdp tp 2d curves; do grep -v "  *[0-9.]* ms  *[0-9]*  " $OUT/$f.txt | tail -n 12; done; date
cd $OUT && tar czf all.tgz *.txt *.json && rm -f *.txt *.json; ls -la
