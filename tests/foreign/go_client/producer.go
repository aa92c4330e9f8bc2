package main

import (
	"context"
	"runtime"
	"sync"

	"go_client/tmcv1"
)

const (
	mostOpen  = 1    // requests without a response: what is asked meanwhile goes together into the next one
	mostItems = 1000 // operations of one request
	mostBytes = 1 << 20
)

// Producer performs the operations of any number of goroutines over one stream.
type Producer struct {
	asked chan *question
	open  chan struct{} // a place per request without a response
	ended chan struct{} // closed with the stream
	why   error

	lock      sync.Mutex
	questions map[uint64]*question
}

type question struct {
	operation *tmcv1.Operation
	answer    chan *tmcv1.OperationResult
}

// NewProducer opens a stream that lives as long as ctx.
func NewProducer(ctx context.Context, client tmcv1.MessageServiceClient) (*Producer, error) {
	stream, err := client.Produce(ctx)
	if err != nil {
		return nil, err
	}
	p := &Producer{
		asked: make(chan *question, mostItems), open: make(chan struct{}, mostOpen),
		ended: make(chan struct{}), questions: map[uint64]*question{},
	}
	go p.send(stream)
	go p.receive(stream)
	return p, nil
}

// Perform returns the result of an operation, which may say that it was refused. An error means that the stream ended:
// nobody knows whether the operation was performed, so perform the same one, with its attempt id, over another Producer.
func (p *Producer) Perform(ctx context.Context, operation *tmcv1.Operation) (*tmcv1.OperationResult, error) {
	q := &question{operation: operation, answer: make(chan *tmcv1.OperationResult, 1)}
	select {
	case p.asked <- q:
	case <-p.ended:
		return nil, p.why
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case result := <-q.answer:
		return result, nil
	case <-p.ended:
		select {
		case result := <-q.answer: // it was answered just before
			return result, nil
		default:
			return nil, p.why
		}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *Producer) send(stream tmcv1.MessageService_ProduceClient) {
	last := uint64(0)
	for {
		select {
		case p.open <- struct{}{}:
		case <-p.ended:
			return
		}
		request, size := &tmcv1.ProduceRequest{}, 0
		for q := p.next(true); q != nil; q = p.next(false) {
			last++
			p.lock.Lock()
			p.questions[last] = q
			p.lock.Unlock()
			operation := &tmcv1.Operation{Id: last, Operation: q.operation.Operation} // the caller may repeat its own
			request.Operations = append(request.Operations, operation)
			size += len(q.operation.GetPrepare().GetBody()) + len(q.operation.GetPublish().GetBody())
			if len(request.Operations) == mostItems || size >= mostBytes {
				break
			}
		}
		if stream.Send(request) != nil {
			return // receive learns why
		}
	}
}

// next returns a question, or nil: the stream has ended, or nothing waits.
func (p *Producer) next(wait bool) *question {
	if !wait {
		for range 2 {
			select {
			case q := <-p.asked:
				return q
			default:
				runtime.Gosched() // goroutines that were just answered ask for their next operation
			}
		}
		return nil
	}
	select {
	case q := <-p.asked:
		return q
	case <-p.ended:
		return nil
	}
}

func (p *Producer) receive(stream tmcv1.MessageService_ProduceClient) {
	defer close(p.ended)
	for {
		response, err := stream.Recv()
		if err != nil {
			p.why = err
			return
		}
		<-p.open
		p.lock.Lock()
		for _, result := range response.Results {
			if q := p.questions[result.Id]; q != nil {
				delete(p.questions, result.Id)
				q.answer <- result
			}
		}
		p.lock.Unlock()
	}
}
