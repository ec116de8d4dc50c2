#!/bin/sh
# Measures again what docs/performance.md and docs/topk_performance.md show, on one machine with root: about six hours
# on two quiet cores.
# The convergence study is apart, because it takes hours: see the head of benchmarks/convergence.yaml.
#     benchmarks/measure.sh [FOLDER]        results go to FOLDER, benchmarks/results by default
#     PARTS="nine racks" benchmarks/measure.sh
# It may be stopped at any time: the next call goes on with the part that was under way.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results}
parts=${PARTS:-one_host nine nine_1mb racks sweep 10gbit training training_small training_nine training_deep schedule schedule_bert prices replan sent skew stragglers stragglers_accuracy stragglers_lstm data cached_pictures lars breakdown recipe topk topk_sweep hitopk hitopk_sweep hitopk_paper demo}
dense=ring,torus2d,blueconnect,flexreduce,two_level,halving_doubling,tree
sums=hitopk@0.001:fp16,hitopk@0.01:fp16,gtopk@0.01:fp16,naive_allgather@0.01:fp16,flexreduce:fp16,horovod:fp16 # drawn
mkdir -p "$folder" out
measured=out/measured_parts # those of a call that was stopped
if [ -n "${PARTS:-}" ]; then # what is named is measured in any case
    measured=out/measured_parts_named
    rm -f $measured
fi

hvd_ext() { python -m hvd_ext "$@"; }
studies() { python -m benchmarks.studies "$@"; }
rehearsed() { # HOSTS OPTIONS... -- COMMAND ARGUMENTS...
    hosts=$1
    shift
    hvd_ext cluster run --hosts "$hosts" "$@"
}

for part in $parts; do
    if grep -qx "$part" $measured 2>/dev/null; then continue; fi
    file=$folder/allreduce_$part.json
    case $part in
    one_host)
        rm -f "$file"
        hvd_ext bench allreduce --ranks 2,4 --bytes 4,4096,65536,262144,1000000,4000000,16000000,100000000 --algorithms auto,ring,memory,mpi,horovod --json "$file"
        HOROVOD_CYCLE_TIME=0 hvd_ext bench allreduce --ranks 2,4 --bytes 4,4096,65536 --algorithms auto,horovod --how graph \
            --json "$folder/allreduce_cycle_time_0.json"
        ;;
    nine)
        rm -f "$file"
        for hosts in 2,2 3,2 3,3 4,3 4,4 3,3,3 4,3,3 4,4,3 4,4,4; do
            rehearsed $hosts --rate 100mbit -- python -m hvd_ext bench allreduce --algorithms $dense,mpi,horovod --bytes 16000000 \
                --how graph --repetitions 5 --json "$file" --append
        done
        studies plot-allreduce "$file" --kind clusters --only flexreduce,blueconnect,ring,mpi,horovod \
            --output "$folder/allreduce_nine.png"
        ;;
    nine_1mb)
        rm -f "$file"
        for hosts in 2,2 3,2 3,3 4,3 4,4 3,3,3 4,3,3 4,4,3 4,4,4; do
            rehearsed $hosts --rate 100mbit -- python -m hvd_ext bench allreduce --algorithms $dense,mpi --bytes 1000000 \
                --how engine --repetitions 10 --json "$file" --append
        done
        ;;
    racks)
        rm -f "$file"
        rehearsed 3,3,3,3 --racks 2 --rate 100mbit --rack-rate 50mbit -- python -m hvd_ext bench allreduce \
            --algorithms $dense,mpi --bytes 1000000,16000000 --how engine --repetitions 5 --json "$file"
        ;;
    sweep)
        rm -f "$file"
        rehearsed 2,2 --rate 1gbit -- python -m hvd_ext bench allreduce --algorithms ring,blueconnect,flexreduce,mpi \
            --how engine --bytes 240000,960000,3840000,15360000,61440000,240000000 --json "$file" --append
        rehearsed 3,2 --rate 100mbit -- python -m hvd_ext bench allreduce --algorithms ring,blueconnect,flexreduce,mpi,horovod \
            --how graph --bytes 240000,960000,3840000,15360000,61440000 --seconds-per-row 4 --json "$file" --append
        studies plot-allreduce "$file" --kind sizes --output "$folder/allreduce_sweep.png"
        ;;
    10gbit)
        rm -f "$file"
        for hosts in 1,1 2,1 2,2 4,4; do
            rehearsed $hosts --rate 10gbit -- python -m hvd_ext bench allreduce --algorithms auto,tcp,mpi,horovod \
                --bytes 1000000,16000000,64000000 --json "$file" --append
        done
        ;;
    training)
        rm -f "$folder/training_horovod.json"
        for hosts in 2,2 2,2,1; do
            rehearsed $hosts --rate 100mbit -- python -m hvd_ext bench training --algorithms auto,flexreduce,ring,horovod,horovod-links2 \
                --json "$folder/training_horovod.json" --append
        done
        ;;
    training_small)
        rm -f "$folder/training_small.json"
        for model in small-160 small-1000 mlp; do
            hvd_ext bench training --ranks 2,4 --model $model --algorithms auto,horovod --json "$folder/training_small.json" --append
        done
        ;;
    training_deep)
        # about 13 minutes; 44 steps come first, because layouts change after 20, and may change back after 40
        rm -f "$folder/training_deep.json"
        for hosts in 2,2 2,2,1; do
            rehearsed $hosts --rate 100mbit -- python -m hvd_ext bench training --model deep-60 --warmup 44 \
                --buckets auto,wfbp,single,by_size,mgwfbp,optimal --algorithms auto,horovod,horovod-autotune,multiworker \
                --json "$folder/training_deep.json" --append
        done
        ;;
    schedule)
        # about 5 minutes
        rm -f "$folder/schedule.json"
        for hosts in 2,2 2,2,1 4,4; do
            rehearsed $hosts --rate 100mbit -- python -m benchmarks.studies schedule --model resnet50 --scale 1/16 --ratio 0.5,1,2 \
                --bucketers auto,wfbp,single,by_size,mgwfbp,optimal,delay --repetitions 4 --json "$folder/schedule.json" --append
        done
        studies plot-schedule "$folder/schedule.json" --output "$folder/schedule.png"
        ;;
    schedule_bert)
        # about 12 minutes
        rm -f "$folder/schedule_bert.json"
        for hosts in 2,2 2,2,1 4,4; do
            rehearsed $hosts --rate 100mbit -- python -m benchmarks.studies schedule --model bert-base --scale 1/16 --ratio 0.5,1,2 \
                --repetitions 3 --json "$folder/schedule_bert.json" --append
        done
        studies plot-schedule "$folder/schedule_bert.json" --output "$folder/schedule_bert.png"
        ;;
    prices)
        # about 40 minutes
        rm -f "$folder/prices.json"
        for hosts in 2,2 3,2 3,3 4,3 4,4 3,3,3 4,3,3 4,4,3 4,4,4; do
            rehearsed $hosts --rate 100mbit -- python -m benchmarks.studies.prices "$folder/prices.json" "100 Mbit/s"
        done
        for hosts in 2,2 4,4 4,3,3; do
            rehearsed $hosts --rate 100mbit -- python -m benchmarks.studies.prices "$folder/prices.json" "100 Mbit/s" \
                hitopk@0.01 hitopk@0.001 1048576 16777216 100000000
        done
        rehearsed 3,3,3,3 --racks 2 --rate 100mbit --rack-rate 50mbit -- \
            python -m benchmarks.studies.prices "$folder/prices.json" "100 Mbit/s, racks 50" 262144 1048576 16777216
        rehearsed 3,3,3,3 --racks 2 --rate 100mbit --rack-rate 50mbit -- \
            python -m benchmarks.studies.prices "$folder/prices.json" "100 Mbit/s, racks 50, told" told 262144 1048576
        rehearsed 2,2 --rate 1gbit -- python -m benchmarks.studies.prices "$folder/prices.json" "1 Gbit/s"
        for ranks in 2 4; do
            mpirun --oversubscribe -np $ranks python -m benchmarks.studies.prices "$folder/prices.json" "one host"
        done
        ;;
    sent)
        python -m benchmarks.studies.sent "$folder/sent.json"
        ;;
    replan)
        # about 8 minutes
        python -m benchmarks.studies.replan "$folder/replan.json"
        ;;
    skew)
        # about 12 minutes
        rm -f "$folder/skew.json"
        for ranks in 4 12 32; do
            mpirun --oversubscribe -np $ranks python -m benchmarks.studies.skew "$folder/skew.json" $((768 / (ranks + 8)))
        done
        rehearsed 4,4,4 --rate 1gbit -- python -m benchmarks.studies.skew "$folder/skew.json" 40
        ;;
    stragglers)
        # about 20 minutes
        studies stragglers --ranks 8 --modes full,solo,majority,quorum,auto,delay,horovod --json "$folder/stragglers.json"
        studies plot-stragglers "$folder/stragglers.json" --output "$folder/stragglers.png"
        ;;
    stragglers_lstm)
        # about 3 minutes, one core for each rank
        mpirun -np 2 --bind-to core python -m benchmarks.studies.stragglers.lstm "$folder/stragglers_lstm.json"
        ;;
    stragglers_accuracy)
        # about 35 minutes, on the images of: python examples/make_images.py --output out/images
        rm -f "$folder/stragglers_accuracy.json"
        python -m benchmarks.studies.stragglers.accuracy "$folder/stragglers_accuracy.json" out/images
        ;;
    data)
        # about 8 minutes
        # Grain and MosaicML Streaming are measured where they are installed; else a note says that they are left out
        studies data --json "$folder/data.json"
        studies plot-data "$folder/data.json" --output "$folder/data.png"
        ;;
    cached_pictures)
        # about 5 minutes, on the images of: python examples/make_images.py --output out/images
        python -m benchmarks.studies.data.cached_pictures "$folder/cached_pictures.json" out/images
        ;;
    lars)
        # about 25 minutes; four ranks with the tensors of a Transformer need 22 GB
        studies lars --parts norms,update --json "$folder/lars.json"
        studies lars --parts pto --json "$folder/lars.json" --append
        for rate in 100mbit 1gbit; do
            rehearsed 2,2 --rate $rate -- python -m benchmarks.studies lars --models resnet50 --json "$folder/lars_$rate.json"
            rehearsed 2,2 --rate $rate -- python -m benchmarks.studies lars --models transformer --parts norms,pto \
                --json "$folder/lars_$rate.json" --append
        done
        ;;
    breakdown)
        # about 6 minutes
        rehearsed 2,2 --rate 1gbit -- python -m hvd_ext bench breakdown --json "$folder/breakdown.json"
        studies plot-breakdown "$folder/breakdown.json" --output "$folder/breakdown.png"
        ;;
    recipe)
        # about two and a half hours; what was stopped goes on
        python examples/make_images.py --train 6400 --test 3200 --output out/recipe-study-pictures
        python examples/make_images.py --train 1600 --test 64 --output out/recipe-few
        studies recipe out/recipe-study --pictures out/recipe-study-pictures --few out/recipe-few \
            --json "$folder/recipe.json" --plot "$folder/recipe.png"
        ;;
    training_nine)
        rm -f "$folder/training_nine.json"
        for hosts in 2,2 3,2 3,3 4,3 4,4 3,3,3 4,3,3 4,4,3 4,4,4; do
            rehearsed $hosts --rate 100mbit -- python -m hvd_ext bench training --algorithms flexreduce,blueconnect,ring --steps 5 \
                --repetitions 5 --json "$folder/training_nine.json" --append
        done
        studies plot-training "$folder/training_nine.json" --output "$folder/training_nine.png"
        ;;
    topk)
        rm -f "$folder/topk.json"
        # where PyTorch is not installed its rows are left out, and a note says so
        studies topk --threads 1,2 --json "$folder/topk.json"
        studies topk --elements 110000000 --inputs gauss,laplace,gradient --contestants \
            noop,exact,graph,segments,feedback,separate,algorithm1,tf,torch --json "$folder/topk.json" --append
        # short inputs, beside what TensorFlow takes for an op that does nothing
        studies topk --elements 256000,1000000 --inputs gauss,laplace,gradient --contestants \
            noop,noop-graph,exact,graph,tf --json "$folder/topk_small.json"
        studies plot-topk "$folder/topk.json" --elements 25000000 --only exact,algorithm1,tf,torch,numpy --output "$folder/topk.png"
        ;;
    topk_sweep)
        # the sizes and contestants of CommLib's Fig. 6
        studies topk --elements 256000,1000000,4000000,16000000,64000000,128000000 --inputs gauss --densities 0.001 \
            --contestants exact,mstopk,algorithm1,dgc,dgc-tf,tf,torch --seconds-per-row 2 --json "$folder/topk_sweep.json"
        studies plot-topk "$folder/topk_sweep.json" --kind sizes --only exact,algorithm1,dgc-tf,tf,torch --output "$folder/topk_sweep.png"
        ;;
    hitopk)
        rm -f "$folder/hitopk.json"
        for hosts in 4,4 4,4,4 4,3,3; do
            rehearsed $hosts --rate 100mbit -- python -m benchmarks.studies hitopk --repetitions 20 --json "$folder/hitopk.json" --append
        done
        studies hitopk --ranks 2,4 --algorithms hitopk@0.01:fp16,naive_allgather@0.01:fp16,flexreduce,tree,mpi,horovod \
            --json "$folder/hitopk_one_host.json"
        studies plot-hitopk "$folder/hitopk.json" --kind bars --only "$sums" --output "$folder/hitopk.png"
        studies plot-hitopk "$folder/hitopk.json" --kind steps --output "$folder/hitopk_steps.png"
        ;;
    hitopk_sweep)
        rm -f "$folder/hitopk_sweep.json"
        rehearsed 2,2 --rate 100mbit -- python -m benchmarks.studies hitopk --elements 256000,1000000,4000000 --seconds-per-row 5 \
            --simulate 16000000,64000000,128000000 --json "$folder/hitopk_sweep.json"
        studies plot-hitopk "$folder/hitopk_sweep.json" --kind sizes --only "$sums" --output "$folder/hitopk_sweep.png"
        ;;
    hitopk_paper)
        studies hitopk --topology benchmarks/paper_cluster.yaml --json "$folder/hitopk_paper.json" \
            --simulate 256000,1000000,4000000,16000000,25000000,64000000,110000000,128000000 \
            --algorithms hitopk@0.01,hitopk@0.001,hitopk@0.01:fp16,hitopk@0.001:fp16,naive_allgather@0.01,naive_allgather@0.01:fp16,gtopk@0.01:fp16,torus2d,torus2d:fp16,flexreduce:fp16,tree,tree:fp16
        studies plot-hitopk "$folder/hitopk_paper.json" --kind sizes --output "$folder/hitopk_paper.png" \
            --only hitopk@0.001:fp16,hitopk@0.01:fp16,gtopk@0.01:fp16,naive_allgather@0.01:fp16,torus2d:fp16,tree:fp16
        studies plot-hitopk "$folder/hitopk_paper.json" --kind steps --elements 25000000,110000000 \
            --output "$folder/hitopk_paper_steps.png"
        ;;
    demo)
        python examples/demo.py --output out/demo
        cp out/demo/demo.json out/demo/demo.png "$folder"
        ;;
    *)
        echo "measure.sh: part ($part): must be one of those at the head of this file" >&2
        exit 2
        ;;
    esac
    echo "$part" >>$measured
done
rm -f $measured
